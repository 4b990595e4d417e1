"""Naive Mixture-of-Experts programs put together at random; see `programs.Program`."""
