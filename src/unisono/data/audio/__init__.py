"""Audio: reading, features, augmentation, and the transform to network inputs."""
