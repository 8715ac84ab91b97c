"""Ask, run, tell: ``driver.search``, ``preview.preview`` and ``verify.verify``. The only importer of optuna.

Nothing is imported here, so that reading :mod:`.options` or :mod:`.events` loads no optuna.
"""
