"""SearchSpace: for each technique, the choices that may be tried. Presets are the YAML files beside this module."""
