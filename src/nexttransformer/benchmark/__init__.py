"""Speed of everything a run does: steps, updates, optimizer, evaluation, saving, data; behind the `bench` command."""
