"""FX to FX: one file per pass, `pipeline` holds their order."""
