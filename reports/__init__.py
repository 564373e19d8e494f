"""How rows become tables, plots and pages: pure functions of rows, and templates that place strings."""
