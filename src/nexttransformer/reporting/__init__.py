"""The report page of one or several runs: reading run folders, thinning curves, figures, tables, one HTML file."""
