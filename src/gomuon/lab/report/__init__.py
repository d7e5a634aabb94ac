"""What a person reads: report.html and report.md, terminal tables, plots and docs/methods.md."""
