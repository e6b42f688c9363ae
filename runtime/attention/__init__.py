"""What attention needs to know of a batch."""
