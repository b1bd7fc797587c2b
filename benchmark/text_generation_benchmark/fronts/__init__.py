"""What it costs that fronts and their engine are processes of their own."""
