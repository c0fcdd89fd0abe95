// The suppression of boxes that overlap better ones, as MXNet's _contrib_box_nms computes it where boxes come and go in
// one format. The best rows of a sample are compared with those that were kept before them; the others become -1.
#include <algorithm>
#include <utility>
#include <vector>

#include "operator.h"

namespace gluon_amp {

namespace {

constexpr int64_t kRange = 65536;

struct Settings {
  explicit Settings(const Attributes& attributes)
      : most_overlap(attributes.real("overlap_thresh", 0.5)),
        least_score(attributes.real("valid_thresh", 0)),
        most(attributes.integer("topk", -1)),
        box(attributes.integer("coord_start", 2)),
        score(attributes.integer("score_index", 1)),
        label(attributes.integer("id_index", -1)),
        background(attributes.integer("background_id", -1)),
        is_center(attributes.text("in_format", "corner") == "center"),
        by_label(label >= 0 && !attributes.flag("force_suppress", false)) {
    if (attributes.text("in_format", "corner") != attributes.text("out_format", "corner"))
      fail("expected out_format to be in_format");
    if (most == 0) fail("expected topk to be above 0, or below for all rows, received topk=0");
  }
  float most_overlap, least_score;
  int most, box, score, label, background;
  bool is_center, by_label;
};

// Boxes that were kept, each coordinate by itself.
struct Kept {
  std::vector<float> left, top, right, bottom, area;
  std::vector<int32_t> label;
};

struct Box {
  Box(const Settings& s, const float* row) : label(s.by_label ? static_cast<int32_t>(row[s.label]) : 0) {
    const float* given = row + s.box;
    const float width = s.is_center ? given[2] : given[2] - given[0];
    const float height = s.is_center ? given[3] : given[3] - given[1];
    left = s.is_center ? given[0] - given[2] / 2 : given[0];
    right = s.is_center ? given[0] + given[2] / 2 : given[2];
    top = s.is_center ? given[1] - given[3] / 2 : given[1];
    bottom = s.is_center ? given[1] + given[3] / 2 : given[3];
    area = width < 0 || height < 0 ? 0 : width * height;
  }
  float left, top, right, bottom, area;
  int32_t label;
};

VECTORIZED bool overlaps(const Kept& kept, const Box& box, float most) {
  const auto count = static_cast<int64_t>(kept.area.size());
  const float *left = kept.left.data(), *right = kept.right.data(), *top = kept.top.data(),
              *bottom = kept.bottom.data(), *area = kept.area.data();
  const int32_t* label = kept.label.data();
  int32_t found = 0;
#pragma omp simd reduction(| : found)
  for (int64_t i = 0; i < count; ++i) {
    const float width = std::min(right[i], box.right) - std::max(left[i], box.left);
    const float height = std::min(bottom[i], box.bottom) - std::max(top[i], box.top);
    const float shared = (width > 0 ? width : 0) * (height > 0 ? height : 0);
    found |= (shared / (area[i] + box.area - shared) > most) & (label[i] == box.label);
  }
  return found != 0;
}

// The rows of a sample that are kept, the best first.
std::vector<int64_t> kept_rows(const Settings& s, const float* data, int64_t count, int64_t width) {
  std::vector<std::pair<float, int64_t>> best;
  for (int64_t i = 0; i < count; ++i) {
    const float* row = data + i * width;
    const bool is_nothing = s.label >= 0 && row[s.label] == static_cast<float>(s.background);
    if (row[s.score] > s.least_score && !is_nothing) best.emplace_back(row[s.score], i);
  }
  const auto is_better = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };
  const auto compared = s.most < 0 ? best.size() : std::min<size_t>(best.size(), s.most);
  if (compared < best.size())
    std::nth_element(best.begin(), best.begin() + static_cast<int64_t>(compared), best.end(), is_better);
  best.resize(compared);
  std::sort(best.begin(), best.end(), is_better);
  Kept kept;
  std::vector<int64_t> rows;
  for (const auto& each : best) {
    const Box box(s, data + each.second * width);
    if (overlaps(kept, box, s.most_overlap)) continue;
    rows.push_back(each.second);
    kept.left.push_back(box.left);
    kept.top.push_back(box.top);
    kept.right.push_back(box.right);
    kept.bottom.push_back(box.bottom);
    kept.area.push_back(box.area);
    kept.label.push_back(box.label);
  }
  return rows;
}

// Fill an array, and run a function for every row that is kept, with where it lies before and after.
template <class Run>
void for_kept(const Settings& s, const Tensor& data, const Tensor& filled, float value, const Run& run) {
  const int64_t count = data.dim(-2), width = data.dim(-1), size = data.size();
  if (!size) return;
  float* out = filled.as<float>();
  parallel_ranges(size, kRange, [&](int64_t begin, int64_t end) { std::fill(out + begin, out + end, value); });
  for_pieces(size / (count * width), 1, 1, [&](int64_t sample) {
    const int64_t first = sample * count * width;
    int64_t place = first;
    for (const int64_t row : kept_rows(s, data.as<const float>() + first, count, width)) {
      run(first + row * width, place, width);
      place += width;
    }
  });
}

void forward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  for_kept(Settings(attributes), inputs[0], outputs[0], -1,
           [&](int64_t from, int64_t to, int64_t width) { copy(inputs[0], from, outputs[0], to, width); });
}

void backward(const Attributes& attributes, const Tensors& inputs, const Tensors& outputs) {
  for_kept(Settings(attributes), inputs[1], outputs[0], 0,
           [&](int64_t to, int64_t from, int64_t width) { copy(inputs[0], from, outputs[0], to, width); });
}

void shapes(const Attributes& attributes, Shapes& inputs, Shapes& outputs) {
  const Settings s(attributes);
  const Shape& data = inputs[0];
  expect_known(data, "data");
  const int width = data.size() < 2 ? 0 : static_cast<int>(data.back());
  if (s.box < 0 || s.box + 4 > width || s.score < 0 || s.score >= width || s.label >= width)
    fail("expected rows that hold a box from ", s.box, " on, its score at ", s.score, " and its class at ", s.label,
         ", received data of shape ", describe(data));
  outputs[0] = data;
}

}  // namespace

const Operator box_nms{"_gluon_amp_box_nms", takes<1>, float32_types, shapes, forward, backward};

}  // namespace gluon_amp
