"""State that outlives a call: of the process, in other libraries, and on a user's objects. A test finds each.

Places are written ``file:name``, from the package's folder.
"""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """What is held, and how long."""

    why: str
    until: str
    """When it is reset."""


_PROCESS = "the process ends"

VARIABLES: dict[str, Held] = {
    "data/worker_queues.py:_QUEUES": Held("workers hear of their end, whatever ends an epoch", "the iteration is gone"),
    "device_memory/cap.py:_cap": Held("the allocator's limit is the process's", "a plan without a limit is applied"),
    "device_memory/context.py:_opened": Held("what others used before: NVML may hide them", _PROCESS),
    "device_memory/nvml.py:_is_silent": Held("a driver that hangs is asked nothing more", _PROCESS),
    "estimates/forks.py:_asked": Held("the function that a fork runs, handed on unpickled", "the fork ends"),
    "integrations/checks.py:_said": Held("an untried version is said once", _PROCESS),
    "integrations/loaders.py:_unmet": Held("a row that comes after an optimizer's step is late", "that step"),
    "integrations/ray_train.py:_entered": Held("a loss outside a forward_context is told from one in it", "its exit"),
    "internals/fake_tensors.py:_target": Held(
        "a plan is applied on a CPU for a card that is not here", "the block's end"
    ),
    "layers/convert.py:_ORIGINALS": Held("a converted class is taken back to its own", _PROCESS),
    "layers/intercept.py:_current": Held("nested modules share one dispatch mode a thread", "the forward's end"),
    "layers/saved_by.py:_SHARED": Held("copies of a model share what one run showed", "the block ends"),
    "measure/evaluation.py:_listeners": Held("an evaluation by parts of a model is watched", "the evaluation's end"),
    "measure/others.py:_began_with": Held("what others take from a trial is told from what it takes", _PROCESS),
    "measure/processes.py:_earlier_peak_bytes": Held(
        "the largest resident set before it was counted anew is the process's still", _PROCESS
    ),
    "measure/processes.py:_server_pid": Held("a fork is charged as an interpreter of its own", _PROCESS),
    "pruning/factors.py:_REPLACED": Held("weights that factors took the place of", "the weight is gone"),
    "ranks.py:_alone": Held("a step is traced as one process's own part", "the block's end"),
    "techniques/allocator.py:_mapping": Held("glibc's threshold is the process's", "another plan is applied"),
    "techniques/support/disk/unnamed_file.py:_num_forks": Held("what a fork may read is not written over", _PROCESS),
    "techniques/precision.py:_flags_before": Held("TF32 is process-wide in torch", "a next plan is applied"),
    "training/launched.py:_launcher": Held("a script that applies its own plan gets none twice", "hooks are removed"),
    "workers/process.py:_own": Held("children are told from orphans that were adopted", _PROCESS),
    "workers/process.py:_starting": Held("a child is noted before it can be taken for an orphan", "each start's end"),
}
"""Of modules: what is assigned by ``global``, or changed in place."""

CACHES: dict[str, Held] = {
    "commands/where.py:_say_once": Held("said once", _PROCESS),
    "estimates/tracing/grad_accumulation.py:_references_where_unshared": Held("torch's counts are constants", _PROCESS),
    "estimates/technique_speeds.py:file_speeds": Held("a file's speeds are measured once", _PROCESS),
    "estimates/technique_speeds.py:step_seconds": Held("an optimizer's steps are measured once", _PROCESS),
    "estimates/time_law.py:measured_law": Held("the device's speeds are measured once", _PROCESS),
    "estimates/tracing/recurrent.py:_measured": Held("a layer is run once for its workspace", _PROCESS),
    "integrations/loaders.py:_watch_loaders": Held("loaders are watched by one patch", _PROCESS),
    "internals/probes.py:lost": Held("a version does not change", _PROCESS),
    "layers/bits.py:_masks": Held("eight numbers on each device", _PROCESS),
    "layers/convert.py:_converted": Held("modules of one class are converted to one class", _PROCESS),
    "measure/processes.py:_malloc_info": Held("the allocator is asked once whether it tells", _PROCESS),
    "report/page.py:_templates": Held("templates are parsed once", _PROCESS),
    "script/command.py:_check_has_autotune": Held("another Python is asked once", _PROCESS),
    "script/refusal.py:tell_once": Held("said once", _PROCESS),
    "techniques/allocator.py:_of_system": Held("the linker is asked once", _PROCESS),
    "techniques/attention.py:_is_calling": Held("the code of a class is read once", _PROCESS),
    "techniques/optimizers/optimizer_step.py:_handles": Held(
        "hooks of an earlier plan are taken off", "the parameter is gone"
    ),
    "workers/cluster.py:kind_of_devices": Held("a cluster is asked once", _PROCESS),
}
"""Functions of modules that keep what they returned."""

REPLACED: dict[str, Held] = {
    "__main__.py:sys.path": Held("a task file named numpy.py is not imported as numpy", _PROCESS),
    "cli/main.py:sys.stdout": Held("a closed stream is a sink", _PROCESS),
    "cli/main.py:sys.stderr": Held("a closed stream is a sink", _PROCESS),
    "estimates/tracing/fake_ops.py:register_optimizer_step_post_hook": Held("a step in backward is one", "its end"),
    "estimates/tracing/fake_ops.py:register_optimizer_step_pre_hook": Held("a step in backward is one", "its end"),
    "estimates/tracing/known_values.py:setattr": Held("masks are chosen by values of positions", "the step's end"),
    "integrations/loaders.py:DataLoader.__iter__": Held("a row is put on as an epoch begins", _PROCESS),
    "integrations/loaders.py:register_optimizer_step_post_hook": Held("a row after a step is late", _PROCESS),
    "measure/checks/split.py:setattr": Held("an autocast of the model's own is seen", "the block's end"),
    "measure/life/batches.py:_BaseDataLoaderIter.__next__": Held("an evaluation's batches are counted", "it is over"),
    "measure/profiling/module_tracker.py:register_module_forward_hook": Held("which module runs", "the step's end"),
    "measure/profiling/module_tracker.py:register_module_forward_pre_hook": Held("which module runs", "the step's end"),
    "script/launch.py:sys.argv": Held("a script sees its own command line", _PROCESS),
    "script/launch.py:sys.modules": Held("a script is __main__", _PROCESS),
    "script/launch.py:sys.path": Held("as Python starts a module", _PROCESS),
    "script/observer.py:_BaseDataLoaderIter.__next__": Held("what loaders hand out is counted", "hooks are removed"),
    "script/plan/hooks.py:DataLoader.__iter__": Held("a plan is put on the loader", "hooks are removed"),
    "script/plan/hooks.py:nn.Module.__call__": Held("the model is found as it is called", "it is found"),
    "script/plan/hooks.py:register_optimizer_step_post_hook": Held("steps are seen", "hooks are removed"),
    "script/plan/hooks.py:register_optimizer_step_pre_hook": Held("the first step is checked", "hooks are removed"),
    "script/plan/hooks.py:sys.modules['torch.multiprocessing.spawn'].start_processes": Held(
        "processes that a script starts itself are refused", "hooks are removed"
    ),
    "script/plan/hooks.py:torch.Tensor.backward": Held("contexts end with the backward pass", "hooks are removed"),
    "script/plan/hooks.py:torch.autocast.__enter__": Held("an autocast of the script's own is seen", "the first step"),
    "script/plan/hooks.py:torch.autograd.backward": Held("contexts end with the backward pass", "hooks are removed"),
    "script/plan/hooks.py:torch.load": Held("a script that resumes is seen to", "hooks are removed"),
    "script/plan/hooks.py:torch.save": Held("a script's checkpoints are measured", "hooks are removed"),
    "script/plan/hooks.py:torch.multiprocessing.start_processes": Held(
        "processes that a script starts itself are refused", "hooks are removed"
    ),
    "script/plan/hooks.py:torch.optim.Optimizer.__init__": Held("the optimizer is found", "hooks are removed"),
    "script/plan/patches.py:setattr": Held("how the functions of hooks.py and loaders.py are replaced", "as they say"),
    "task_file.py:sys.modules": Held("a task file's classes can be pickled", "it fails, or the process ends"),
    "techniques/support/comparable.py:setattr": Held(
        "dropout that is called as a function, in any thread", "the block's end"
    ),
    "techniques/support/tf32.py:torch.backends.cuda.matmul.allow_tf32": Held("TF32 is process-wide", "a next plan"),
    "techniques/support/tf32.py:torch.backends.cudnn.allow_tf32": Held("TF32 is process-wide", "a next plan"),
    "workers/trial/child.py:sys.argv": Held("a task sees its own file", _PROCESS),
    "script/trial/choosing.py:nn.Module.__call__": Held("calls without gradients are counted", "hooks are removed"),
    "workers/trial/spawn.py:os.environ": Held("a script's process is told its trial", _PROCESS),
}
"""Of other libraries and of Python: what stands in the place of theirs, and hooks that see every object."""

MARKS: dict[str, Held] = {
    "_autotune_channels_last": Held("on a model: names of weights in another order", "a next plan is applied"),
    "_autotune_compiled": Held("on a module that a plan compiles: what the user compiled stays", "the plan is undone"),
    "_autotune_dataset": Held("on a cache of ours that stands in a dataset's place, which has its names", "it is gone"),
    "_autotune_in_force": Held("on a LightningModule: fitting again changes nothing", "the module is gone"),
    "_autotune_kept_state": Held("on an optimizer: in how many bits its state is kept", "the optimizer is gone"),
    "_autotune_low_rank": Held("on a model: the ranks chosen", "the model is gone"),
    "_autotune_own": Held("on an Accelerator: its methods before a plan", "the Accelerator is gone"),
    "_autotune_plan": Held("on a loader that goes to accelerator.prepare", "the loader is gone"),
    "_autotune_pruning": Held("on a model: the channels cut", "the model is gone"),
    "_autotune_replaced": Held("on a weight: another is in its place, and optimizers are told", "the weight is gone"),
    "_autotune_row": Held("on a loader: the row for its first epoch", "the loader is gone"),
    "_autotune_rows": Held("on an embedding: a plan has its gradients sparse", "a next plan is applied"),
    "_autotune_samples": Held("on the same cache", "it is gone"),
    "_autotune_schedule": Held("on an optimizer of Lightning's: its schedule by steps", "the optimizer is gone"),
    "_autotune_site": Held("on a converted module: who else keeps its tensors, and what it computes", "restore"),
    "_autotune_trained_weights": Held("on a model: names of weights in bfloat16", "a next plan is applied"),
    "_autotune_variant": Held("on a model: which variant it is", "the model is gone"),
}
"""Attributes on a user's objects."""
