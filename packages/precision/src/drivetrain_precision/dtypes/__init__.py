"""The dtypes of a run: those of parameters, reductions and outputs, and the modules that stay in fp32."""
