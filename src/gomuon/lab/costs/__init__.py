"""`gomuon plan`: memory, FLOPs and bytes sent of a method on a model and many ranks."""
