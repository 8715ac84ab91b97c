"""The quality process: weights and data are loaded once, and cuts of the model are chosen and judged from all seeds."""
