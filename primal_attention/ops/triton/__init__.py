"""The toolbox of the fused ops in Triton: device code for blocks of tokens, and launches."""
