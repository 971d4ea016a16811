"""Reports: one HTML page and one JSON file about model folders that trundle wrote."""
