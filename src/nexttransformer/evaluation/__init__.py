"""The fixed evaluation: bits per byte and CORE, both pure functions of a checkpoint and hashed inputs."""
