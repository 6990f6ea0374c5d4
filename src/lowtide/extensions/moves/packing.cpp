// Two searches for offsets below a capacity, exact and in the order of time. See packing.py.
// Plain C interface, no PyTorch: compiled once per machine by lowtide.native.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <unordered_set>
#include <vector>

namespace {

constexpr int64_t WALL = INT64_MAX / 4;
constexpr int PLACES_LOG2 = 24;
constexpr double NOISE = 4.0;
constexpr int64_t FIRST_NODES = 400;
enum Outcome { FAILED = 0, SOLVED = 1, STOPPED = 2 };

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Valley {
  int begin, end;
  int64_t height, left, right;
};

struct Choice {
  int buffer;  // or -1: leave [begin, end) empty up to `height`
  int begin, end;
  int64_t height;
};

class Search {
 public:
  Search(int count, const int32_t* lower, const int32_t* upper, const int64_t* size, int sections,
         int64_t capacity)
      : count_(count),
        lower_(lower),
        upper_(upper),
        size_(size),
        sections_(sections),
        capacity_(capacity),
        floor_(sections, 0),
        remaining_(sections, 0),
        gone_(sections + 1, 0),
        crossing_(sections + 1, 0),
        starts_(sections),
        ends_(sections + 1),
        placed_(count, 0),
        offset_(count, 0),
        key_(count),
        rank_(count, 0) {
    uint64_t state = 0x9E3779B97F4A7C15ull;
    for (int b = 0; b < count; ++b) key_[b] = mix(state += 0x9E3779B97F4A7C15ull);
    for (int b = 0; b < count; ++b) {
      for (int s = lower[b]; s < upper[b]; ++s) remaining_[s] += size[b];
      for (int s = lower[b] + 1; s < upper[b]; ++s) ++crossing_[s];
      starts_[lower[b]].push_back(b);
      ends_[upper[b]].push_back(b);
    }
  }

  bool ready() const { return dead_ != nullptr; }

  bool fits() const {
    return std::all_of(remaining_.begin(), remaining_.end(), [&](int64_t r) { return r <= capacity_; });
  }

  // One descent with at most `limit` nodes under one order of the choices.
  Outcome run(int order, uint64_t seed, int64_t limit, double deadline) {
    limit_ = nodes_ + limit;
    by_fit_ = seed % 2 == 0;
    deadline_ = deadline;
    uint64_t state = seed * 0xD1342543DE82EF95ull + 1;
    for (int b = 0; b < count_; ++b) {
      const double width = upper_[b] - lower_[b], height = static_cast<double>(size_[b]);
      const double noise = 1.0 + NOISE * static_cast<double>(mix(state += 0x9E3779B97F4A7C15ull) >> 40) /
                                     (1 << 24) * (seed > 0);
      rank_[b] = noise * (order == 0   ? width
                          : order == 1 ? height
                          : order == 2 ? width * height
                                       : 1.0 / width);
    }
    auto first = [&](int a, int b) { return rank_[a] != rank_[b] ? rank_[a] > rank_[b] : a < b; };
    for (auto& list : starts_) std::sort(list.begin(), list.end(), first);
    for (auto& list : ends_) std::sort(list.begin(), list.end(), first);
    return solve(0, sections_);
  }

  const std::vector<int64_t>& offsets() const { return offset_; }

 private:
  int64_t height(int s) const { return remaining_[s] ? floor_[s] : WALL; }

  void place(int b, int64_t at) {
    placed_[b] = 1;
    offset_[b] = at;
    for (int s = lower_[b]; s < upper_[b]; ++s) floor_[s] = at + size_[b], remaining_[s] -= size_[b];
    for (int s = lower_[b] + 1; s < upper_[b]; ++s) --crossing_[s];
  }

  void lift(int b, int64_t at) {
    placed_[b] = 0;
    for (int s = lower_[b]; s < upper_[b]; ++s) floor_[s] = at, remaining_[s] += size_[b];
    for (int s = lower_[b] + 1; s < upper_[b]; ++s) ++crossing_[s];
  }

  // Parts that no unplaced buffer joins are solved one by one.
  Outcome solve(int begin, int end) {
    std::vector<std::pair<int, int>> parts;
    for (int s = begin; s < end;) {
      if (!remaining_[s]) { ++s; continue; }
      int stop = s + 1;
      while (stop < end && crossing_[stop]) ++stop;
      parts.emplace_back(s, stop);
      s = stop;
    }
    if (parts.empty()) return SOLVED;
    if (parts.size() == 1) return part(parts[0].first, parts[0].second);
    std::sort(parts.begin(), parts.end(),
              [](auto& a, auto& b) { return a.second - a.first < b.second - b.first; });
    const auto floors = floor_;
    const auto remaining = remaining_;
    const auto crossing = crossing_;
    const auto placed = placed_;
    for (auto& [from, to] : parts) {
      const Outcome outcome = part(from, to);
      if (outcome != SOLVED) {
        floor_ = floors, remaining_ = remaining, crossing_ = crossing, placed_ = placed;
        return outcome;
      }
    }
    return SOLVED;
  }

  Outcome part(int begin, int end) {
    if (++nodes_ > limit_ || ((nodes_ & 255) == 0 && now() > deadline_)) return STOPPED;
    uint64_t state = mix(static_cast<uint64_t>(begin) * 1000003u + end);
    for (int s = begin; s < end; ++s) {
      state = mix(state ^ static_cast<uint64_t>(height(s)));
      for (int b : starts_[s]) if (!placed_[b]) open_.push_back(b);
    }
    uint64_t set = 0;
    for (int b : open_) set ^= key_[b];
    open_.clear();
    state ^= set;
    if (failed(state)) return FAILED;

    std::vector<Choice> best, found;
    bool any = false;
    for (int s = begin; s < end;) {
      const int64_t here = height(s);
      int stop = s + 1;
      while (stop < end && height(stop) == here) ++stop;
      const int64_t left = s > begin ? height(s - 1) : WALL, right = stop < end ? height(stop) : WALL;
      if (here < WALL && left > here && right > here) {
        const Valley valley{s, stop, here, left, right};
        if (!supplied(valley)) {
          remember(state);
          return FAILED;
        }
        for (int side = 0; side < 2; ++side) {
          choices(valley, side == 0, found);
          if (found.empty()) {
            remember(state);
            return FAILED;
          }
          if (!any || found.size() < best.size()) best.swap(found), any = true;
        }
        if (best.size() == 1) break;
      }
      s = stop;
    }
    for (const Choice& choice : best) {
      Outcome outcome;
      if (choice.buffer >= 0) {
        place(choice.buffer, choice.height);
        outcome = solve(begin, end);
        if (outcome == SOLVED) return SOLVED;
        lift(choice.buffer, choice.height);
      } else {
        const int64_t before = floor_[choice.begin];
        for (int s = choice.begin; s < choice.end; ++s) floor_[s] = choice.height;
        outcome = solve(begin, end);
        if (outcome == SOLVED) return SOLVED;
        for (int s = choice.begin; s < choice.end; ++s) floor_[s] = before;
      }
      if (outcome == STOPPED) return STOPPED;
    }
    remember(state);
    return FAILED;
  }

  // Only what lives wholly within the valley's time can lie between its walls: the rest of each section has
  // to fit above the lower wall.
  bool supplied(const Valley& v) {
    const int64_t wall = std::min(v.left, v.right);
    if (wall >= WALL) return true;
    int64_t inside = 0;
    for (int s = v.begin; s < v.end; ++s) {
      for (int b : starts_[s])
        if (!placed_[b] && upper_[b] <= v.end) inside += size_[b], gone_[upper_[b]] += size_[b];
      inside -= gone_[s];
      gone_[s] = 0;
      if (wall + remaining_[s] - inside > capacity_) {
        std::fill(gone_.begin() + v.begin, gone_.begin() + v.end + 1, 0);
        return false;
      }
    }
    gone_[v.end] = 0;
    return true;
  }

  // What can lie in the valley's lower left (or right) corner: a buffer that begins (ends) there, or nothing.
  void choices(const Valley& v, bool from_left, std::vector<Choice>& found) {
    found.clear();
    for (int b : from_left ? starts_[v.begin] : ends_[v.end]) {
      if (placed_[b] || lower_[b] < v.begin || upper_[b] > v.end) continue;
      bool twin = false;
      for (const Choice& c : found)
        twin |= lower_[c.buffer] == lower_[b] && upper_[c.buffer] == upper_[b] && size_[c.buffer] == size_[b];
      if (!twin) found.push_back({b, 0, 0, v.height});
    }
    // A buffer that fills the valley's width, or reaches a wall's very height, seldom does so by chance.
    // Every other round, one of the short ones, believes it.
    auto fit = [&](const Choice& c) {
      const int64_t top = v.height + size_[c.buffer];
      return (top == v.left) + (top == v.right) + (lower_[c.buffer] == v.begin && upper_[c.buffer] == v.end);
    };
    if (by_fit_)
      std::stable_sort(found.begin(), found.end(),
                       [&](const Choice& a, const Choice& b) { return fit(a) > fit(b); });
    // Leaving the corner empty wastes bytes: only where every section there can spare them.
    if (remaining_[from_left ? v.begin : v.end - 1] + v.height >= capacity_) return;
    int64_t least = WALL;
    int from = v.begin, to = v.end;
    for (int s = v.begin; s < v.end; ++s)
      for (int b : starts_[s]) {
        if (placed_[b] || upper_[b] > v.end) continue;
        least = std::min(least, size_[b]);
        if (from_left && lower_[b] > v.begin) to = std::min(to, static_cast<int>(lower_[b]));
        if (!from_left && upper_[b] < v.end) from = std::max(from, static_cast<int>(upper_[b]));
      }
    const int64_t raised = std::min({v.left, v.right, least >= WALL ? WALL : v.height + least});
    if (raised >= WALL) return;
    for (int s = from; s < to; ++s) if (raised + remaining_[s] > capacity_) return;
    found.push_back({-1, from, to, raised});
  }

  // One place for each state, the last that came: forgetting costs time, not exactness. Pages that nobody
  // writes take no memory.
  void remember(uint64_t state) { dead_[state >> (64 - PLACES_LOG2)] = state; }
  bool failed(uint64_t state) const { return dead_[state >> (64 - PLACES_LOG2)] == state; }

  const int count_;
  const int32_t *lower_, *upper_;
  const int64_t* size_;
  const int sections_;
  const int64_t capacity_;
  std::vector<int64_t> floor_, remaining_, gone_;
  std::vector<int> crossing_;
  std::vector<std::vector<int>> starts_, ends_;
  std::vector<char> placed_;
  std::vector<int64_t> offset_;
  std::vector<uint64_t> key_;
  std::vector<double> rank_;
  std::vector<int> open_;
  std::unique_ptr<uint64_t, decltype(&std::free)> table_{
      static_cast<uint64_t*>(std::calloc(size_t{1} << PLACES_LOG2, sizeof(uint64_t))), &std::free};
  uint64_t* const dead_ = table_.get();
  int64_t nodes_ = 0, limit_ = 0;
  double deadline_ = 0;
  bool by_fit_ = true;
};

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

struct Option {
  int state;
  int place;  // index in live before which the buffer goes
  int64_t at;
  double cost;
  uint64_t key;
};

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
    std::vector<Option> choices;
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
                         [](const Option& x, const Option& y) {
                           return x.cost != y.cost ? x.cost < y.cost : x.key < y.key;
                         });
        choices.resize(width);
      }
      next.clear();
      for (const Option& c : choices) {
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
  void expand(State& state, int number, int b, std::vector<Option>& choices,
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

  void add(const State& state, int number, int b, int place, int64_t at, std::vector<Option>& choices,
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

// 1 1 2 1 1 2 4 1 1 2 ...: how long each round searches (Luby, Sinclair and Zuckerman 1993).
// Most packings fall at once to some order, or to none soon.
int64_t luby(uint64_t number) {
  uint64_t power = 1;
  while (2 * power - 1 < number) power *= 2;
  return number == 2 * power - 1 ? static_cast<int64_t>(power) : luby(number - power + 1);
}

}  // namespace

// 1: offsets found; 0: there are none below the capacity; 2: the time was up.
extern "C" int lowtide_pack(int count, const int32_t* lower, const int32_t* upper, const int64_t* size,
                            int sections, int64_t capacity, double seconds, int64_t* offsets) {
  Search search(count, lower, upper, size, sections, capacity);
  if (!search.ready()) return 2;
  if (!search.fits()) return 0;
  const double deadline = now() + seconds;
  for (uint64_t round = 0;; ++round) {
    for (int order = 0; order < 4; ++order) {
      const int outcome = search.run(order, round, FIRST_NODES * luby(round + 1), deadline);
      if (outcome == SOLVED) std::copy(search.offsets().begin(), search.offsets().end(), offsets);
      if (outcome != STOPPED) return outcome;
      if (now() > deadline) return STOPPED;
    }
  }
}

// 1: offsets found, 2: none found.
extern "C" int lowtide_sweep(int count, const int32_t* lower, const int32_t* upper, const int64_t* size,
                             int sections, int64_t capacity, double seconds, int64_t* offsets) {
  const double deadline = now() + seconds;
  std::vector<int32_t> from(count), to(count);
  for (int b = 0; b < count; ++b) from[b] = sections - upper[b], to[b] = sections - lower[b];
  Sweep forward(count, lower, upper, size, sections, capacity),
      backward(count, from.data(), to.data(), size, sections, capacity);
  for (size_t width = 16; width <= 4096; width *= 4) {
    for (Sweep* sweep : {&forward, &backward}) {
      if (now() > deadline) return STOPPED;
      if (sweep->run(width, deadline, offsets)) return SOLVED;
    }
  }
  return STOPPED;
}
