"""The dtypes of a run: what parameters are held, reduced and returned in, and the modules that stay in fp32."""
