"""What leaves the workbench: tuning tables, figures, the report."""
