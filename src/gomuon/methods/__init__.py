"""The methods, one file each: formula, recipe, class and the stations only it has."""
