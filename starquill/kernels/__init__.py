"""The native kernels, and the doors to them. Nothing outside this folder imports the module."""
