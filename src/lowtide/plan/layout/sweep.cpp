// Beam search for offsets below a capacity, buffer by buffer in the order of time. See sweep.py.
// Plain C interface, no PyTorch: compiled once per machine by lowtide.native.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <unordered_set>
#include <vector>

namespace {

struct Live {
  int64_t at, top;
  int end;
};

struct State {
  std::vector<Live> live;  // by offset
  int step;                // number of the last placement in `history`, or -1
};

struct Placement {
  int before;
  int64_t at;
};

struct Choice {
  int state;
  int place;  // index in live before which the buffer goes
  int64_t at;
  double cost;
  uint64_t key;
};

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Sweep {
 public:
  Sweep(int count, const int32_t* lower, const int32_t* upper, const int64_t* size, int sections,
        int64_t capacity)
      : count_(count),
        lower_(lower),
        upper_(upper),
        size_(size),
        capacity_(capacity),
        weight_(sections + 1, 0.0),
        order_(count) {
    std::vector<int64_t> load(sections + 1, 0);
    for (int b = 0; b < count; ++b) load[lower[b]] += size[b], load[upper[b]] -= size[b];
    int64_t alive = 0;
    for (int s = 0; s < sections; ++s) {
      alive += load[s];
      double share = static_cast<double>(alive) / static_cast<double>(capacity);
      share *= share, share *= share, share *= share;
      weight_[s + 1] = weight_[s] + share + 1e-6;
    }
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](int a, int b) {
      if (lower[a] != lower[b]) return lower[a] < lower[b];
      return size[a] != size[b] ? size[a] > size[b] : upper[a] > upper[b];
    });
  }

  bool run(size_t width, double deadline, int64_t* offsets) {
    std::vector<State> beam{{{}, -1}}, next;
    std::vector<Choice> choices;
    std::vector<Placement> history;
    std::unordered_set<uint64_t> seen;
    for (int b : order_) {
      choices.clear();
      seen.clear();
      for (int k = 0; k < static_cast<int>(beam.size()); ++k) {
        if (k % 64 == 0 && now() > deadline) return false;
        expand(beam[k], k, b, choices, seen);
      }
      if (choices.empty()) return false;
      if (choices.size() > width) {
        std::nth_element(choices.begin(), choices.begin() + width, choices.end(),
                         [](const Choice& x, const Choice& y) {
                           return x.cost != y.cost ? x.cost < y.cost : x.key < y.key;
                         });
        choices.resize(width);
      }
      next.clear();
      for (const Choice& c : choices) {
        next.push_back({beam[c.state].live, static_cast<int>(history.size())});
        auto& live = next.back().live;
        live.insert(live.begin() + c.place, {c.at, c.at + size_[b], upper_[b]});
        history.push_back({beam[c.state].step, c.at});
      }
      beam.swap(next);
    }
    int step = beam.front().step;
    for (int k = count_ - 1; k >= 0; --k) {
      offsets[order_[k]] = history[step].at;
      step = history[step].before;
    }
    return true;
  }

 private:
  // Both ends of every gap that is large enough; of two states that will never differ again only one.
  void expand(State& state, int number, int b, std::vector<Choice>& choices,
              std::unordered_set<uint64_t>& seen) {
    auto& live = state.live;
    live.erase(std::remove_if(live.begin(), live.end(), [&](const Live& l) { return l.end <= lower_[b]; }),
               live.end());
    int64_t floor = 0;
    for (int place = 0; place <= static_cast<int>(live.size()); ++place) {
      const int64_t ceiling = place < static_cast<int>(live.size()) ? live[place].at : capacity_;
      if (ceiling - floor >= size_[b]) {
        add(state, number, b, place, floor, choices, seen);
        if (ceiling - floor > size_[b]) add(state, number, b, place, ceiling - size_[b], choices, seen);
      }
      if (place < static_cast<int>(live.size())) floor = live[place].top;
    }
  }

  void add(const State& state, int number, int b, int place, int64_t at, std::vector<Choice>& choices,
           std::unordered_set<uint64_t>& seen) {
    const Live mine{at, at + size_[b], upper_[b]};
    const int count = static_cast<int>(state.live.size()) + 1;
    auto get = [&](int k) -> const Live& {
      return k < place ? state.live[k] : k == place ? mine : state.live[k - 1];
    };
    const double here = weight_[lower_[b]];
    uint64_t key = 0x9E3779B97F4A7C15ull;
    // How long holes will lie above each buffer and above the floor, if nothing more came: time counts the
    // more the fuller it is.
    double cost = get(0).at > 0 ? weight_.back() - here : weight_.back() - weight_[get(0).end];
    for (int k = 0; k < count; ++k) {
      const Live& l = get(k);
      key = mix(key ^ mix(static_cast<uint64_t>(l.at) * 31 + l.end));
      if (l.top == capacity_) continue;
      const bool touched = k + 1 < count && get(k + 1).at == l.top;
      cost += std::max(0.0, weight_[l.end] - (touched ? weight_[get(k + 1).end] : here));
    }
    if (seen.insert(key).second) choices.push_back({number, place, at, cost, key});
  }

  const int count_;
  const int32_t *lower_, *upper_;
  const int64_t* size_;
  const int64_t capacity_;
  std::vector<double> weight_;
  std::vector<int> order_;
};

}  // namespace

// 1: offsets found, 0: none found.
extern "C" int lowtide_sweep(int count, const int32_t* lower, const int32_t* upper, const int64_t* size,
                             int sections, int64_t capacity, double seconds, int64_t* offsets) {
  const double deadline = now() + seconds;
  std::vector<int32_t> from(count), to(count);
  for (int b = 0; b < count; ++b) from[b] = sections - upper[b], to[b] = sections - lower[b];
  Sweep forward(count, lower, upper, size, sections, capacity),
      backward(count, from.data(), to.data(), size, sections, capacity);
  for (size_t width = 16; width <= 4096; width *= 4) {
    for (Sweep* sweep : {&forward, &backward}) {
      if (now() > deadline) return 0;
      if (sweep->run(width, deadline, offsets)) return 1;
    }
  }
  return 0;
}
