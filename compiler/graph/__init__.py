"""What all passes stand on."""
