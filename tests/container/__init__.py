"""The harness of `test_container.py`: a docker daemon, the base image, the image, containers."""
