"""Pure tensor functions, one folder an op: the readable reference beside the fast form."""
