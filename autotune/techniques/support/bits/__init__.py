"""Numbers in fewer bits: of an optimizer's state, and of weights that do not train."""
