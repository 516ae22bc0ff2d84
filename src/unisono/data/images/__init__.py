"""Images: decoding, augmentation, and the transform to network inputs."""
