// The exponential average of values, corrected for its bias towards the zero that it begins with (as in Adam).

export function smooth(values, weight) {
  let sum = 0;
  let bias = 1;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    bias *= weight;
    return sum / (1 - bias);
  });
}
