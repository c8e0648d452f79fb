"""Models of devices and links."""
