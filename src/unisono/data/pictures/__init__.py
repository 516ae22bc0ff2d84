"""Conversion of the bytes of images to network inputs."""
