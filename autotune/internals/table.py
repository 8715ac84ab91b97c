"""Private parts of torch, transformers, accelerate, lightning, ray and others that this package goes by.

A path names a part: ``torch.nn.Module._call_impl``. ``f(a, b)`` also says by which parameters it is called, and
``f:name`` that the function ``f`` reads or writes ``name``: an attribute that objects have, and their class has not.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIED = {
    "torch": "2.13",
    "transformers": "5.23",
    "accelerate": "1.15",
    "lightning": "2.6",
    "ray": "2.60",
    "optuna": "5.0",
    "yaml": "6.0",
}
"""Versions (major and minor) in which all parts were there, and the suite passed."""


@dataclass(frozen=True)
class Feature:
    """What goes by some private parts."""

    name: str
    """By which it is asked for (``lost``)."""
    without: str
    """What happens where a part is missing."""
    parts: tuple[str, ...]
    """Paths."""


def _of_techniques(name: str, *parts: str) -> Feature:
    """One that techniques name as their ``goes_by``."""
    without = "a technique that goes by it is not offered to a search, and a plan that has one is refused"
    return Feature(name, without, parts)


_NODE = "torch.autograd.graph.Node"
_CALL = ("torch.nn.Module._compiled_call_impl", "torch.nn.Module._call_impl")
_FAKE = "torch._subclasses.fake_tensor"
_LOADER = "torch.utils.data.dataloader"
_WORKERS = f"{_LOADER}._MultiProcessingDataLoaderIter"
_ATEN = "torch.ops.aten"

FEATURES: tuple[Feature, ...] = (
    _of_techniques(
        "compiled modules",
        *_CALL,
        "torch._functorch.config",
        "torch._inductor.compile_fx.compile_fx(model_, example_inputs_, inner_compile, config_patches)",
        "torch._inductor.list_mode_options(mode)",
        "torch._inductor.cudagraph_trees.reset_cudagraph_trees",
        "torch.utils._pytree.tree_map_only",
    ),
    _of_techniques(
        "saved tensors",
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._get_tracing_state",
        "torch.autograd.forward_ad._current_level",
        "torch.autograd.Variable._execution_engine",
        "torch.Tensor._base",
        "torch.Tensor._version",
        "torch.Tensor._is_view",
        "torch.Tensor._backward_hooks",
        "torch.UntypedStorage._cdata",
        f"{_NODE}._register_hook_dict",
        f"{_NODE}._saved_result1",
        f"{_NODE}._saved_result2",
        "torch.nn.Module._buffers",
        "torch.nn.Module._forward_hooks",
        "torch.nn.Module._forward_pre_hooks",
        "torch.nn.functional.multi_head_attention_forward:has_torch_function",
        "torch._fused_sdp_choice",
        "torch._scaled_dot_product_attention_math",
        "torch._softmax_backward_data",
        f"{_ATEN}._adaptive_avg_pool2d_backward",
        f"{_ATEN}._adaptive_avg_pool3d_backward",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map_only",
    ),
    _of_techniques("integer products", "torch._int_mm"),
    Feature("float8 products", "a plan with `precision: {kind: float8}` is refused", ("torch._scaled_mm",)),
    _of_techniques(
        "recomputed blocks",
        "torch.Tensor._version",
        "torch.nn.Module._buffers",
        "torch.nn.modules.batchnorm._NormBase",
    ),
    _of_techniques(
        "attention switches",
        "transformers.configuration_utils.PretrainedConfig._attn_implementation",
        "transformers.modeling_utils.PreTrainedModel._can_set_attn_implementation",
        "transformers.modeling_utils.PreTrainedModel._supports_sdpa",
        "transformers.modeling_utils.PreTrainedModel._supports_flex_attn",
    ),
    _of_techniques("steps in backward", "torch.optim.Optimizer.__init__:_optimizer_step_pre_hooks"),
    _of_techniques(
        "optimizer state",
        "torch.optim.Adam._init_group",
        "torch.optim.SGD._init_group",
        "torch.optim.SGD.step.__wrapped__",
    ),
    _of_techniques(
        "loader workers",
        "torch.utils.data.DataLoader.__init__:_iterator",
        f"{_WORKERS}.__init__:_index_queues",
        f"{_WORKERS}.__init__:_workers",
        f"{_WORKERS}.__init__:_shutdown",
        f"{_WORKERS}.__init__:_worker_pids_set",
        f"{_WORKERS}._reset:_send_idx",
        f"{_WORKERS}._reset:_rcvd_idx",
        f"{_WORKERS}._reset:_tasks_outstanding",
        f"{_LOADER}._BaseDataLoaderIter.__init__:_pin_memory",
        f"{_LOADER}._BaseDataLoaderIter.__init__:_base_seed",
        f"{_LOADER}._SingleProcessDataLoaderIter.__init__:_dataset_fetcher",
        "torch.utils.data._utils.worker._generate_state",
        "torch._C._set_worker_pids",
        "torch._C._remove_worker_pids",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_map",
    ),
    _of_techniques(
        "frozen weights",
        "torch.Tensor._make_wrapper_subclass",
        "torch._assert_async",
        "torch._C.DisableTorchFunctionSubclass",
        "torch._ops.OpOverload.__init__:_schema",
        "torch.nn.Module.register_state_dict_post_hook:_state_dict_hooks",
        "torch.nn.Module.register_parameter:_parameters",
        "torch.Tensor.register_hook:_backward_hooks",
        "torch.Tensor.register_post_accumulate_grad_hook:_post_accumulate_grad_hooks",
        f"{_ATEN}._to_copy",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map",
    ),
    _of_techniques(
        "offloaded weights",
        "torch.Tensor._make_wrapper_subclass",
        "torch._C.DisableTorchFunctionSubclass",
        "torch._C._DisableTorchDispatch",
        "torch._C._current_graph_task_id",
        "torch._ops.OpOverload.__init__:_schema",
        "torch.nn.Module.register_state_dict_post_hook:_state_dict_hooks",
        f"{_ATEN}._to_copy",
        "torch.utils._pytree.tree_leaves",
        "torch.utils._pytree.tree_map",
    ),
    Feature(
        "models' own plans of tensor parallelism",
        "`parallel: {kind: tensor}` splits the linear layers of feed-forward parts alone",
        ("transformers.modeling_utils.PreTrainedModel.init_parallel_plans:_tp_plan",),
    ),
    _of_techniques("cut convolutions", "torch.nn.modules.conv._ConvNd"),
    Feature(
        "trials",
        "no trial can be run, and the first one says so",
        (
            "torch._dynamo.callback.callback_handler",
            "torch.cuda._lazy_call",
            "torch.ops.mkldnn._is_mkldnn_bf16_supported",
            "torch.nn.modules.batchnorm._BatchNorm",
            "torch.nn.modules.conv._ConvNd",
            "torch.nn.modules.dropout._DropoutNd",
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._pytree.tree_flatten",
            "torch.utils._pytree.tree_unflatten",
            "torch.utils._pytree.tree_map",
            "torch.Tensor._version",
            "torch.UntypedStorage._cdata",
        ),
    ),
    Feature(
        "graph breaks",
        "a trial does not say where torch.compile breaks a model into pieces",
        ("torch._dynamo.utils.graph_break_reasons",),
    ),
    Feature(
        "conditions of a trace",
        "`export --to onnx` writes no file",
        ("torch.export.ExportedProgram.__init__:_guards_code",),
    ),
    Feature(
        "evaluation",
        "a job's own evaluation is not measured, and the trial says so",
        (*_CALL, "torch.distributed.distributed_c10d._get_default_store"),
    ),
    Feature(
        "estimates",
        "memory is predicted from real steps at small batches, in wider intervals",
        (
            f"{_FAKE}.FakeTensor",
            f"{_FAKE}.FakeTensorMode",
            f"{_FAKE}.FakeCopyMode",
            f"{_FAKE}.in_kernel_invocation_manager",
            f"{_FAKE}.unset_fake_temporarily",
            f"{_FAKE}.CONSTANT_NUMEL_LIMIT",
            "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo",
            "torch._C._dispatch_get_registrations_for_dispatch_key",
            "torch.library._scoped_library",
            "torch.utils._pytree.tree_leaves",
            "torch.utils._pytree.tree_map_only",
            "torch._C._storage_Use_Count",
            "torch.Tensor._use_count",
            "torch.amp.GradScaler.__init__:_per_optimizer_states",
            f"{_ATEN}._coalesce",
            f"{_ATEN}._sparse_coo_tensor_with_dims_and_tensors",
            f"{_ATEN}._unsafe_view",
            f"{_ATEN}._local_scalar_dense",
            f"{_ATEN}._fused_sdp_choice",
            f"{_ATEN}._fused_rms_norm",
            f"{_ATEN}._grouped_mm",
            f"{_ATEN}._softmax_backward_data",
            f"{_ATEN}._adaptive_avg_pool2d_backward",
            f"{_ATEN}._scaled_dot_product_attention_math",
            f"{_ATEN}._scaled_dot_product_efficient_attention",
            f"{_ATEN}._scaled_dot_product_efficient_attention_backward",
            f"{_ATEN}._scaled_dot_product_flash_attention",
            f"{_ATEN}._scaled_dot_product_flash_attention_backward",
            f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu",
            f"{_ATEN}._scaled_dot_product_flash_attention_for_cpu_backward",
        ),
    ),
    Feature(
        "profile",
        "neither `profile` nor a prediction can be had: both trace steps by these",
        (
            "torch._C._current_autograd_node",
            "torch._C._autograd._get_sequence_nr",
            "torch._C._autograd._top_saved_tensors_default_hooks",
            f"{_NODE}._sequence_nr",
            "torch.Tensor._indices",
            "torch.Tensor._values",
            "torch.utils._pytree.tree_leaves",
        ),
    ),
    Feature(
        "scripts",
        "a script is neither searched nor run with a plan, and is told so",
        (
            *_CALL,
            "torch._C._get_tracing_state",
            "torch.cuda._lazy_call",
            "torch.autocast.__init__:_enabled",
            "torch.Tensor._version",
            f"{_NODE}._saved_other",
            f"{_NODE}._saved_reduction",
            f"{_LOADER}._BaseDataLoaderIter.__next__",
            f"{_LOADER}._BaseDataLoaderIter.__init__:_index_sampler",
            f"{_LOADER}._BaseDataLoaderIter.__init__:_num_yielded",
            f"{_LOADER}._BaseDataLoaderIter.__init__:_sampler_iter",
            "torch._dynamo.eval_frame.OptimizedModule.__init__:_orig_mod",
            "torch._dynamo.utils.counters",
        ),
    ),
    Feature(
        "transformers",
        "the integration refuses the plan, or the Trainer",
        (
            "transformers.Trainer._get_num_items_in_batch(self, batch_samples, device)",
            "transformers.Trainer._prepare_inputs(self, inputs)",
            "transformers.Trainer.get_eval_dataloader:_eval_dataloaders",
            "transformers.modeling_utils.PreTrainedModel._initialize_weights:_is_hf_initialized",
            "accelerate.state.AcceleratorState.__init__:_mixed_precision",
        ),
    ),
    Feature(
        "accelerate",
        "the integration refuses the plan",
        (*_CALL, "accelerate.Accelerator.prepare:_is_accelerate_prepared"),
    ),
    Feature(
        "lightning",
        "the integration refuses the plan, or the module",
        (
            *_CALL,
            "lightning.pytorch.loops.fit_loop._FitLoop.__init__:_data_source",
            "lightning.pytorch.loops.fit_loop._FitLoop.__init__:_combined_loader",
            "lightning.pytorch.loops.evaluation_loop._EvaluationLoop.__init__:_data_source",
            "lightning.pytorch.loops.evaluation_loop._EvaluationLoop.__init__:_combined_loader",
            "lightning.fabric.wrappers._FabricModule.__init__:_forward_module",
            "torch.utils.data.RandomSampler.__init__:_num_samples",
            "torch.optim.Adam.__init__:_step_supports_amp_scaling",
        ),
    ),
    Feature(
        "ray_pool",
        "no trial runs by Ray: use --executor local",
        (
            "ray._private.state.state.get_draining_nodes",
            "ray._private.state.available_resources_per_node",
            "ray.init:_temp_dir",
        ),
    ),
    Feature(
        "sampler",
        "no search can choose its next trial, and it says so",
        ("optuna.samplers.BaseSampler._raise_error_if_multi_objective",),
    ),
    Feature(
        "pinned workers",
        "workers that an epoch hands on may hear of the process's end 5 s late",
        (f"{_WORKERS}._register_persistent_workers_atexit",),
    ),
    Feature("yaml", "plans and spaces are read by PyYAML's own parser, a third as fast", ("yaml._yaml.CParser",)),
)
