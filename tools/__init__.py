"""What only this repository needs; nothing here is in the wheel."""
