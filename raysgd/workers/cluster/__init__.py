"""The Ray cluster: connect to it, or start one; its nodes, its control service, and processes of
this machine. Both."""
