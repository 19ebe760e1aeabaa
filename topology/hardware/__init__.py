"""What there is: hosts, devices, links and interfaces."""
