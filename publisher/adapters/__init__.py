"""What differs between trainers."""
