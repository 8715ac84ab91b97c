"""Charts of the pages, laid out for SVG."""
