"""A training's micro-batches: which samples they hold, where each stands in its optimizer step, and their loaders."""
