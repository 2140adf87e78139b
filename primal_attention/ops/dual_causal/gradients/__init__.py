"""The walk backward of the fused form, in a folder of its own for its length."""
