"""What a search believes of a configuration before it is measured: asked of children, corrected by what was seen."""
