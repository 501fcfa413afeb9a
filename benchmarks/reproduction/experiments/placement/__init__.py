"""Which instances get a request, and which requests are refused."""
