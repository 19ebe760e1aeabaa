"""The Batch API's form: bodies checked, requests in, responses out; no HTTP."""
