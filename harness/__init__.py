"""Measuring: requests, client, engines, runs, records. Imports nothing of gates, reports or decoder."""
