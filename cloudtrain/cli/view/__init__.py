"""What several commands share: options, tables, and how runs, logs and errors are shown."""
