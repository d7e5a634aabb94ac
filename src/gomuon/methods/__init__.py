"""The methods, one file each: formula, recipe, class and the method's own stations."""
