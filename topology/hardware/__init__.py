"""Hardware: hosts, devices, links and interfaces."""
