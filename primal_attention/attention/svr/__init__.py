"""Attention-BN and Attention-SH of the SVR framework, and both together."""
