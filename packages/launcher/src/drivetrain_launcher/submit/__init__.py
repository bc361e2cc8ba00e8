"""Submit a job to a cluster: the request from flags, the launch line inside the job, the record to find it again."""
