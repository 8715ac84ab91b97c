"""The search: proposes configurations, measures them, and writes a plan. The only folder that imports optuna.

Nothing is imported here, so that reading :mod:`.options` or :mod:`.events` loads no optuna.
"""
