"""What is made of measurements: reports, tables, charts."""
