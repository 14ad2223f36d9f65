"""One worker of the class API: its operator, its place in the data, its steps and their results.
Worker."""
