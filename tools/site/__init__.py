"""What builds the site from docs/: `make docs`. It is not in the wheel."""
