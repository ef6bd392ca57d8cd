"""Layer maths over kernels. Knows layers and weights, opens no files."""
