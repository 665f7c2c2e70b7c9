"""The gate of a pull request: reads git objects, never the work tree, and runs nothing of what it judges."""
