"""Many runs, one verdict: verify."""
